package fleet

// Decide makes one decision of a controller that does not run: for a benchmark.
var Decide = (*Controller).decide

// Hold has such a controller lead until a context ends.
var Hold = (*Controller).hold
