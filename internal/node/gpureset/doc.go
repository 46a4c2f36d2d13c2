// Package gpureset resets one GPU by NVIDIA's nvidia-smi: NVML has no call for that. It decides nothing about when, and expects that no API gives the
// GPU out, that nobody holds it, and that this agent has closed the driver.
//
//	open files of /dev/nvidiaN . any: *InUseError, nothing was called
//	persistence mode . . . . . . on: off for the reset, and on again whatever becomes of it
//	nvidia-smi --gpu-reset . . . "was successfully reset", or *RefusedError with nvidia-smi's text
//
// A process that has the GPU open is named, and never stopped.
package gpureset
