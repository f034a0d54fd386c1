"""`pina compare`: a matrix of runs (rows × ε × seeds), its tables, its figures and what they rest on.

    matrix.py      the file that says what to compare
    grid.py        from the matrix to its cells, each a run with a full configuration
    cells.py       running one cell so that it can be interrupted, fail, and be taken up again
    comparison.py  running all of them
    results.py     what the cells left, read back
    table.py, figures.py, page.py    what is written of it

Results live in files only: whatever is written is made anew from the folders of the cells, so that there is
nothing to fall out of step with them.
"""
