"""Do fewer tokens take less time? `msvit bench`, in the order it works.

    images.py     a folder of images -> different squares; never copies of one
    masks.py      a gate whose share of fine cells is the one asked for, on these very images
    rows.py       what is timed: the dense host, and the ways to run mixed-scale tokens
    training.py   the same rows as a training step
    clock.py      calls in turn, medians and quartiles, speed-ups of neighbours
    memory.py     what a call needs beyond the model
    roofline.py     what the machine could do at best
    workload.py   one model, size and batch -> one record;  suites.py: lists of them
    record.py     machine, versions, commit;  results.py: the file of records
"""
