// Axes: scales, ticks and the numbers beside them. Stands in one function with page.js.

function niceStep(span, wanted) {
  const raw = span / wanted;
  const power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].find((factor) => factor * power >= raw * 0.999) * power;
}

function linearTicks(low, high, wanted) {
  const step = niceStep(high - low || 1, wanted);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(i * step);
  return ticks;
}

function logTicks(low, high, wanted) {
  const first = Math.ceil(Math.log10(low) - 1e-9);
  const last = Math.floor(Math.log10(high) + 1e-9);
  const decades = last - first + 1;
  if (decades >= 3) {
    const every = Math.ceil(decades / wanted);
    return Array.from({ length: decades }, (_, i) => i).filter((i) => i % every === 0).map((i) => 10 ** (first + i));
  }
  const factors = Math.log10(high / low) > 1 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 6, 8];
  const ticks = [];
  for (let power = first - 1; power <= last; power++) {
    for (const factor of factors) ticks.push(factor * 10 ** power);
  }
  const inside = ticks.filter((tick) => tick >= low * 0.9999 && tick <= high * 1.0001);
  return inside.length >= 3 ? inside : linearTicks(low, high, wanted);
}

function minorTicks(low, high) {
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); 10 ** power < high; power++) {
    for (let factor = 2; factor < 10; factor++) ticks.push(factor * 10 ** power);
  }
  return ticks.filter((tick) => tick > low && tick < high);
}

const SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹";
function tickText(value) {
  if (value === 0) return "0";
  const power = Math.log10(Math.abs(value));
  if (power >= -3.001 && power < 6) return String(Number(value.toPrecision(6)));
  const whole = Math.floor(power + 1e-9);
  const factor = Number((value / 10 ** whole).toPrecision(3));
  const raised = String(Math.abs(whole)).replace(/\d/g, (digit) => SUPERSCRIPTS[digit]);
  return `${factor === 1 ? "" : `${factor}·`}10${whole < 0 ? "⁻" : ""}${raised}`;
}

function valueText(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 100000 || size < 0.001) return value.toExponential(2).replace("e+", "e");
  return String(Number(value.toPrecision(4)));
}

function axis(log, low, high, from, to) {
  const at = log ? Math.log10 : (value) => value;
  const [a, b] = [at(low), at(high)];
  const scale = (value) => from + ((at(value) - a) / (b - a || 1)) * (to - from);
  scale.back = (place) => {
    const value = a + ((place - from) / (to - from)) * (b - a);
    return log ? 10 ** value : value;
  };
  scale.at = at;
  scale.minor = () => (log && Math.log10(high / low) < 6 ? minorTicks(low, high) : []);
  scale.ticks = (wanted) => (log ? logTicks(low, high, wanted) : linearTicks(low, high, wanted));
  return scale;
}

function range(values, log) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (!(high > low)) return log ? [low / 2, high * 2] : [low - 0.5, high + 0.5];
  if (log) {
    const pad = (high / low) ** 0.04;
    return [low / pad, high * pad];
  }
  return [low - 0.05 * (high - low), high + 0.05 * (high - low)];
}
