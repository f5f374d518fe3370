"""Do fewer tokens take less time? `msvit bench`, in the order it works.

    images.py        a folder of images -> different squares; never copies of one
    calibration.py   a gate with the share of fine cells that was asked for, and reducers of the same cost
    rows.py          what is timed: the dense host, and the ways to run mixed-scale tokens, forward or training step
    machine.py       memory of a call, and the lower bounds of its time
    workload.py      one model, size and batch -> one record; suites of them
    summary.py       counts and times -> the numbers of the record
    results.py       machine, versions, commit; the file of records
    trained.py       trained runs side by side
"""
