"""The networks of tutti/models made of Keras layers: the same by name, with channels innermost, on any backend."""
