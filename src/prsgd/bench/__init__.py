"""The comparison with other libraries: the same work over the same link, on links that are made here.

``prsgd bench`` calls it. A *contestant* is one way to train a model on several ranks; a *race* lets all of them take
turns over one link with one model, so that what the machine does meanwhile hits all alike.
"""
