"""Studies: many runs of one recipe, their execution, analysis and conclusions."""
