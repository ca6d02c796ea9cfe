"""The learner of Keras and TensorFlow: models, optimizers, `fit` or a gradient tape, around the same job."""
