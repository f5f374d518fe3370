"""`python -m msvit`: the command of msvit_lab."""

from msvit_lab.__main__ import main

if __name__ == "__main__":
    main()
