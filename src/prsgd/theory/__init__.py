"""The paper's theory as numbers: bounds from constants. Imports neither torch nor the loop."""
