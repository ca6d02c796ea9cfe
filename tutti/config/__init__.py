"""What a run is: typed schema, YAML recipes, inheritance, overrides, validation."""
