"""The laboratory: what the command `msvit` needs besides the library.

    cli/ -> recipes.py, config.py -> hosts.py, build.py, data/ -> training/ -> runs.py -> evaluate.py, evaluation/
    sweep.py  bench/  viz/  report/

It imports the library (`msvit.*`); the library never imports it, which is a test.
"""
