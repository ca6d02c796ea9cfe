"""The folder that makes `import horovod` mean tutti, where it is on Python's path."""
