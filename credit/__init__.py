"""Weightings and advantages that need more than one function: a critic, fresh samples, a state.

mitigations.py names the file of each, which is imported when its method is chosen.
"""
