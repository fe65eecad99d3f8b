"""A small continuous-batching engine over transformers models, with K and V in Pageant's cache.

config     sizes                             pages      who owns which page, known prefixes
model      load a model (smollm2: default)   runner     one step through the model
request    one prompt on its way             sampler    the next token
scheduler  who computes what in a step       engine     the loop that joins them
drafts     guesses at the next tokens        metrics    what it took
generate   the command line (display: output)  decode_graphs  steps as CUDA graphs
"""
