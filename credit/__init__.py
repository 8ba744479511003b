"""Weightings and advantages that need more than one function: a critic, fresh samples, a state.

mitigations.py imports those that are choices of --mitigation and --advantage: that is how they join
the lists of harness/registry.py.
"""
