"""The campaign of faults, in reading order: draw, scene (what runs), places, deeds, judge, campaign."""
