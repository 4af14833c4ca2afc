"""The paper's theory as numbers: bounds and plans from constants, and a probe that estimates them. Never the loop."""
