"""From the numbers in run folders to tables, figures and one page that explains them.

    read (folders -> runs) -> series (runs -> groups, curves, rows) -> verdict, table, figures, page

Nothing here imports torch or the loop: a report can be made where nothing can be trained. matplotlib is imported when
the first figure is drawn.
"""
