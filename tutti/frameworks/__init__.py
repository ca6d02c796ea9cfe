"""Recipes in Keras and TensorFlow: models, data, `fit` or an explicit loop, checkpoints, in the same run folder."""
