// The charts of the page. Stands in one function with axes.js, see page.html.j2.

const data = JSON.parse(document.getElementById("report-data").textContent);
const COLOURS = 7;
const DASHES = ["", "9 4", "2.5 3", "11 4 2.5 4", "5 3"];
const SHAPES = [
  "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0", "M-3.6-3.6h7.2v7.2h-7.2z", "M0-4.6L4.4 3.4H-4.4z",
  "M0-5L5 0L0 5L-5 0z", "M0 4.6L4.4-3.4H-4.4z",
];
const hidden = new Set(); // names of the curves switched off, in all charts
const views = [];

const colour = (style) => `var(--c${style % COLOURS})`;
const dash = (style) => DASHES[style % DASHES.length];
const shape = (style) => SHAPES[style % SHAPES.length];

function svg(name, attributes = {}, parent = null) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (parent) parent.append(made);
  return made;
}

function html(name, attributes = {}, parent = null) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (parent) parent.append(made);
  return made;
}

function text(parent, content, attributes) {
  svg("text", attributes, parent).textContent = content;
}

function sample(style, parent) {
  const box = svg("svg", { width: 34, height: 12, viewBox: "0 0 34 12", "aria-hidden": "true" }, parent);
  svg("path", { d: "M0 6H34", "stroke-dasharray": dash(style), style: `stroke:${colour(style)};stroke-width:2` }, box);
  svg("path", { d: shape(style), transform: "translate(17 6)", style: `fill:${colour(style)}` }, box);
}

// Charts

function view(figure) {
  const chart = data.charts[figure.dataset.chart];
  const self = { figure, chart, place: null, x: null, y: null };
  self.svg = svg("svg", { class: "chart", role: "img", tabindex: 0, "aria-label": `${chart.title}. Arrow keys read values.` });
  figure.append(self.svg);
  legend(self);
  self.tip = html("div", { class: "tip", role: "status", hidden: "" }, figure);
  self.svg.addEventListener("pointermove", (event) => point(self, event));
  self.svg.addEventListener("pointerleave", () => leave(self));
  self.svg.addEventListener("blur", () => leave(self));
  self.svg.addEventListener("keydown", (event) => key(self, event));
  return self;
}

function legend(self) {
  const list = html("ul", { class: "legend", "aria-label": "Curves" }, self.figure);
  self.buttons = self.chart.curves.map((curve) => {
    const button = html("button", { type: "button", "aria-pressed": "true", title: "Show or hide in all figures" }, html("li", {}, list));
    sample(curve.style, button);
    button.append(curve.name);
    button.addEventListener("click", () => toggle(curve.name));
    return [curve.name, button];
  });
}

function toggle(name) {
  if (!hidden.delete(name)) hidden.add(name);
  views.forEach((self) => {
    for (const [curve, button] of self.buttons) button.setAttribute("aria-pressed", String(!hidden.has(curve)));
    draw(self);
  });
}

const shown = (self) => self.chart.curves.filter((curve) => !hidden.has(curve.name));

function draw(self) {
  const { chart } = self;
  const width = Math.max(280, Math.round(self.figure.clientWidth));
  const height = Math.round(Math.min(430, Math.max(270, width * 0.5)));
  const box = { left: 62, right: width - 14, top: 16, bottom: height - 46 };
  // The axes fit all curves, also those switched off: they stay where they are while one compares.
  const xs = chart.curves.flatMap((curve) => curve.x);
  let [left, right] = range(xs, chart.log_x);
  if (!chart.log_x) [left, right] = [0, Math.max(...xs) || 1];
  let [low, high] = range(chart.curves.flatMap((curve) => [...curve.low, ...curve.high]), chart.log_y);
  if (chart.floor !== null) {
    low = chart.floor;
    const top = Math.max(...chart.curves.flatMap((curve) => curve.high));
    high = top + 0.06 * (top - low || 1);
  }
  if (chart.ceiling !== null) {
    high = chart.ceiling;
    const bottom = Math.min(...chart.curves.flatMap((curve) => curve.low));
    low = bottom - 0.06 * (high - bottom || 1);
  }
  self.x = axis(chart.log_x, left, right, box.left, box.right);
  self.y = axis(chart.log_y, low, high, box.bottom, box.top);
  self.box = box;
  self.svg.replaceChildren();
  self.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  frame(self, width, height);
  const clip = `clip-${chart.key}`;
  svg("rect", { x: box.left, y: box.top - 6, width: box.right - box.left + 6, height: box.bottom - box.top + 6 },
    svg("clipPath", { id: clip }, self.svg));
  const inside = svg("g", { "clip-path": `url(#${clip})` }, self.svg);
  shown(self).forEach((curve) => band(self, curve, inside));
  shown(self).forEach((curve) => line(self, curve, inside));
  for (const [x, y] of chart.rings) svg("circle", { class: "ring", cx: self.x(x), cy: self.y(y), r: 8 }, inside);
  self.cross = svg("g", {}, self.svg);
  leave(self);
}

function frame({ svg: root, chart, box, x, y }, width, height) {
  for (const tick of y.ticks(5)) {
    svg("line", { class: "grid", x1: box.left, x2: box.right, y1: y(tick), y2: y(tick) }, root);
    text(root, tickText(tick), { x: box.left - 8, y: y(tick) + 4.5, "text-anchor": "end" });
  }
  for (const tick of y.minor()) svg("line", { class: "axis", x1: box.left - 3, x2: box.left, y1: y(tick), y2: y(tick) }, root);
  for (const tick of x.minor()) svg("line", { class: "axis", x1: x(tick), x2: x(tick), y1: box.bottom, y2: box.bottom + 3 }, root);
  for (const tick of x.ticks(width < 520 ? 4 : 8)) {
    svg("line", { class: "axis", x1: x(tick), x2: x(tick), y1: box.bottom, y2: box.bottom + 5 }, root);
    text(root, tickText(tick), { x: x(tick), y: box.bottom + 19, "text-anchor": "middle" });
  }
  svg("path", { class: "axis", fill: "none", d: `M${box.left} ${box.top}V${box.bottom}H${box.right}` }, root);
  for (const mark of chart.marks.filter((mark) => x(mark) < box.right)) {
    svg("line", { class: "mark", x1: x(mark), x2: x(mark), y1: box.top, y2: box.bottom }, root);
    text(root, "lr / 10", { class: "mark-text", x: x(mark), y: box.top - 5, "text-anchor": "middle" });
  }
  text(root, chart.x_label, { class: "title", x: (box.left + box.right) / 2, y: height - 6, "text-anchor": "middle" });
  const middle = (box.top + box.bottom) / 2;
  text(root, chart.y_label, { class: "title", x: 14, y: middle, "text-anchor": "middle", transform: `rotate(-90 14 ${middle})` });
}

const path = (self, xs, ys) => xs.map((x, i) => `${i ? "L" : "M"}${self.x(x).toFixed(1)} ${self.y(ys[i]).toFixed(1)}`).join("");

function band(self, curve, parent) {
  if (curve.low.every((value, i) => value === curve.high[i])) return;
  const back = path(self, [...curve.x].reverse(), [...curve.low].reverse()).replace("M", "L");
  svg("path", { class: "band", d: `${path(self, curve.x, curve.high)}${back}Z`, style: `fill:${colour(curve.style)}` }, parent);
}

function line(self, curve, parent) {
  const group = svg("g", { class: "curve", "data-name": curve.name }, parent);
  const stroke = `stroke:${colour(curve.style)}`;
  svg("path", { class: "line", d: path(self, curve.x, curve.mean), "stroke-dasharray": dash(curve.style), style: stroke }, group);
  const apart = Math.max(1, Math.round(curve.x.length / 7));
  for (let i = Math.floor((curve.style % 5) * apart / 5); i < curve.x.length; i += apart) {
    const place = `translate(${self.x(curve.x[i]).toFixed(1)} ${self.y(curve.mean[i]).toFixed(1)})`;
    svg("path", { class: "marker", d: shape(curve.style), transform: place, style: `fill:${colour(curve.style)}` }, group);
  }
}

// Reading values

function places(self) {
  return [...new Set(shown(self).flatMap((curve) => curve.x))].sort((a, b) => a - b);
}

function point(self, event) {
  const seen = self.svg.getBoundingClientRect();
  const at = ((event.clientX - seen.left) / seen.width) * self.svg.viewBox.baseVal.width;
  const distance = (x) => Math.abs(self.x(x) - at);
  const all = places(self);
  if (all.length) read(self, all.reduce((best, x) => (distance(x) < distance(best) ? x : best)));
}

function key(self, event) {
  const all = places(self);
  const now = all.indexOf(self.place);
  const stride = event.shiftKey ? 10 : 1;
  const moves = { ArrowLeft: now - stride, ArrowRight: now + stride, Home: 0, End: all.length - 1 };
  if (event.key === "Escape") leave(self);
  if (!(event.key in moves) || !all.length) return;
  event.preventDefault();
  read(self, all[Math.min(all.length - 1, Math.max(0, now < 0 && event.key === "ArrowLeft" ? all.length - 1 : moves[event.key]))]);
}

/** On the straight line that is drawn between two points; null where the curve does not reach. */
function valueAt(self, curve, x) {
  const after = curve.x.findIndex((value) => value >= x);
  if (after < 0 || (after === 0 && curve.x[0] > x)) return null;
  if (curve.x[after] === x) return curve.mean[curve.x.lastIndexOf(x)];
  const [a, b] = [self.x.at(curve.x[after - 1]), self.x.at(curve.x[after])];
  const share = (self.x.at(x) - a) / (b - a);
  const [low, high] = [self.y.at(curve.mean[after - 1]), self.y.at(curve.mean[after])];
  const value = low + share * (high - low);
  return self.chart.log_y ? 10 ** value : value;
}

function read(self, x) {
  const { box, chart } = self;
  self.place = x;
  self.cross.replaceChildren();
  const at = self.x(x);
  svg("line", { class: "cross", x1: at, x2: at, y1: box.top, y2: box.bottom }, self.cross);
  self.tip.replaceChildren();
  html("b", {}, self.tip).textContent = chart.x_label.includes(" sent") ? `${valueText(x)} ${chart.x_label}` : `${chart.x_label} ${valueText(x)}`;
  for (const curve of shown(self)) {
    const value = valueAt(self, curve, x);
    const row = html("div", {}, self.tip);
    sample(curve.style, row);
    html("span", {}, row).textContent = curve.name;
    html("span", {}, row).textContent = value === null ? "–" : valueText(value);
    const y = value === null ? Infinity : self.y(value);
    if (y <= box.bottom) svg("circle", { class: "dot", cx: at, cy: y, r: 4, style: `fill:${colour(curve.style)}` }, self.cross);
  }
  self.tip.hidden = false;
  const zoom = self.svg.clientWidth / self.svg.viewBox.baseVal.width;
  const beside = at * zoom + 14;
  const fits = beside + self.tip.offsetWidth <= self.figure.clientWidth;
  const place = fits ? beside : Math.max(0, at * zoom - 14 - self.tip.offsetWidth);
  const below = self.figure.clientWidth < 520; // where it would cover half of the curves
  self.tip.style.transform = `translate(${place}px, ${below ? self.svg.clientHeight : box.top * zoom + 8}px)`;
}

function leave(self) {
  self.place = null;
  self.tip.hidden = true;
  self.cross.replaceChildren();
}

// Who saw what

function drawSplit(figure) {
  figure.querySelector("svg")?.remove();
  const width = Math.max(280, Math.round(figure.clientWidth));
  const tall = data.split.counts.length > 24 ? 12 : 26;
  const height = data.split.counts.length * tall + 52;
  const root = svg("svg", { class: "chart", role: "img", "aria-label": `Samples of each ${data.split.word} that each worker saw`, viewBox: `0 0 ${width} ${height}` }, figure);
  const most = Math.max(1, ...data.split.counts.map((row) => row.reduce((sum, count) => sum + count, 0)));
  const x = axis(false, 0, most, 62, width - 14);
  data.split.counts.forEach((row, worker) => {
    let begin = 0;
    const top = 6 + worker * tall;
    const every = Math.ceil(14 / tall);
    if (worker % every === 0) text(root, worker, { x: 54, y: top + tall / 2 + 4, "text-anchor": "end" });
    row.forEach((count, label) => {
      if (!count) return;
      const [from, to] = [x(begin), x(begin + count)];
      const bar = svg("rect", { class: "bar", x: from, y: top + 1.5, width: Math.max(0.5, to - from - 1), height: tall - 3, fill: data.groups[label].fill }, root);
      svg("title", {}, bar).textContent = `worker ${worker}, ${data.split.word} ${data.split.names[label]}: ${count} samples`;
      const name = data.split.names[label];
      if (to - from > 9 + 7 * name.length && tall > 16) {
        const ink = `fill:${data.groups[label].ink};font-size:12px;pointer-events:none`;
        text(root, name, { x: (from + to - 1) / 2, y: top + tall / 2 + 4, "text-anchor": "middle", style: ink });
      }
      begin += count;
    });
  });
  const bottom = height - 44;
  for (const tick of linearTicks(0, most, width < 520 ? 4 : 8)) {
    svg("line", { class: "axis", x1: x(tick), x2: x(tick), y1: bottom, y2: bottom + 5 }, root);
    text(root, tickText(tick), { x: x(tick), y: bottom + 19, "text-anchor": "middle" });
  }
  svg("path", { class: "axis", fill: "none", d: `M62 2V${bottom}H${width - 14}` }, root);
  text(root, "samples", { class: "title", x: (62 + width - 14) / 2, y: height - 6, "text-anchor": "middle" });
  const middle = bottom / 2;
  text(root, "worker", { class: "title", x: 14, y: middle, "text-anchor": "middle", transform: `rotate(-90 14 ${middle})` });
}

document.querySelectorAll("[data-chart]").forEach((figure) => views.push(view(figure)));
const splits = [...document.querySelectorAll("[data-split]")];
const drawAll = () => {
  views.forEach(draw);
  splits.forEach(drawSplit);
};
let drawnWidth = 0;
const fit = () => {
  const width = document.querySelector("main").clientWidth;
  if (width !== drawnWidth) {
    drawnWidth = width;
    drawAll();
  }
};
fit();
window.addEventListener("resize", fit);
