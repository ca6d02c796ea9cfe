"""The command horovodrun, and horovod.run: ranks on this host and others, of a fixed or a changing number."""
