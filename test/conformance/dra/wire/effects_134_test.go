//go:build before1.35

package wire

// API servers of 1.34 refuse a taint with the effect None.
const hasEffectNone = false
