//go:build race

package storm

// raced says that the race detector is on. It keeps memory of its own for every goroutine that ever was, so the
// resident size tells nothing; the heap does.
const raced = true
