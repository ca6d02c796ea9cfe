"""The colours, marks and strokes of all pictures, and matplotlib set up to draw them without a screen."""

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

__all__ = ["plt"]  # beside the constants below: every picture is drawn with it

# The colours of Okabe and Ito, which people with any colour vision can tell apart; marks and strokes are for print.
BLUE, VERMILION, GREEN, PINK, ORANGE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
GREY, BLACK, NEUTRAL, LIGHT_GREY = "#888888", "#000000", "#808080", "#BBBBBB"
COLOURS = (BLUE, VERMILION, GREEN, PINK, ORANGE, SKY, GREY)
ON_BLACK = {  # brighter shades of those that are too dark on a dark page
    BLUE: "#4FA8E0",
    VERMILION: "#FF8B45",
    GREEN: "#2FC79A",
    PINK: "#E7A1C8",
    GREY: "#B0B0B0",
    NEUTRAL: "#A8A8A8",
}
MARKS = ("o", "s", "D", "^", "v", "p", "*")
STROKES = ("-", "--", ":", "-.")
