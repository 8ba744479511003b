"""More weightings and advantages. Many of them need more than one function: a critic, fresh
samples, a state.

lab/engine/methods.py names the module of each, which is imported when the method is chosen.
"""
