from msvit.cli import main

main()
