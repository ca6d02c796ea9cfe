"""Optimizers by name, among them LARS, LAMB and Muon."""
