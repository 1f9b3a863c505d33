"""The experiments that find out when a method pays: a queue of comparisons, and the script that takes them in order."""
