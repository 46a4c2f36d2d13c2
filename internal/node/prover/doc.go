// Package prover runs the proofs that core/proof decides about: it takes a GPU away from its API, runs the operator's command on it, gives the GPU back,
// and records the verdict.
//
//	Run      decides . state on disk . . . . . . . . . . . . . . . condition published . GPU given back . state on disk
//	a proof                         . GPU taken . command . ends .
//
// Only the goroutine of Run changes the state. Each proof has a goroutine, which ends soon after its context. A GPU that failed is given back when its
// condition is published, so it takes no work in between.
package prover
