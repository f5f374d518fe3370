from msvit.lab.cli import main

main()
