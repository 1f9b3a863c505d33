"""Experiments that find out when a method pays off: a queue of comparisons, and a script that runs them in order."""
