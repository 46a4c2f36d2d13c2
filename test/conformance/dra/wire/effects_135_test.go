//go:build !before1.35

package wire

const hasEffectNone = true
