"""Kernels for one architecture each, in Gluon: layouts, copies and barriers are written out."""
