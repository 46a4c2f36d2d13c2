// Package resetter resets GPUs by what package reset decides, and for a person who asks for it. It does to its node what it is told to by Node and by
// gpureset.Resetter, and nothing else.
//
//	decided, on disk . . . . . taken from every API . . . no process . . . driver closed . . . on disk . . . nvidia-smi . . . driver opened, read . . . on disk . . . given back
//	                                                                                           |                          |
//	it can be cancelled . . . . . . . . . . . . . . . . . . . . . . . . . . . . . . . . . . .  | it is awaited, also by an agent that ends
//
// It has a goroutine for as long as a reset runs; the one of Run, which decides, is there only with a policy that is on.
package resetter
