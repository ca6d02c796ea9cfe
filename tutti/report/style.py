"""The colours, markers and line styles of all pictures, and matplotlib with the Agg backend."""

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

__all__ = ["plt"]  # besides the constants below

# The palette of Okabe and Ito, distinguishable with any colour vision; markers and line styles are for print.
BLUE, VERMILION, GREEN, PINK, ORANGE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
GREY, BLACK, NEUTRAL, LIGHT_GREY = "#888888", "#000000", "#808080", "#BBBBBB"
COLOURS = (BLUE, VERMILION, GREEN, PINK, ORANGE, SKY, GREY)
ON_BLACK = {  # brighter shades for the dark theme
    BLUE: "#4FA8E0",
    VERMILION: "#FF8B45",
    GREEN: "#2FC79A",
    PINK: "#E7A1C8",
    GREY: "#B0B0B0",
    NEUTRAL: "#A8A8A8",
}
MARKS = ("o", "s", "D", "^", "v", "p", "*")
STROKES = ("-", "--", ":", "-.")
