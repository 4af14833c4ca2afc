"""From the numbers in run folders to tables, figures and one page that explains them.

    read (folders -> runs, every field checked) -> series (runs -> groups, rows)
    -> curves, places, times (groups -> what figures show) -> figures/ (one file each) -> page
    -> table, verdict, about (groups -> text)                                          -> page

verified and plan do the same for ``prsgd verify`` and ``prsgd plan``. Nothing here imports torch or the loop: a report
can be made where nothing can be trained. matplotlib is imported when the first figure is drawn.
"""
