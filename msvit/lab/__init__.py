"""The laboratory: what the command `msvit` needs besides the library.

    data/  recipes/  training/  runs.py  evaluation/  sweep.py  bench/  viz/  report/  cli/

It imports the library (`msvit.*`); the library never imports it, which is a test.
"""
