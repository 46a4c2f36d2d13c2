// Package gpureset resets one GPU by NVIDIA's nvidia-smi: NVML has no call for that. It decides nothing about when, and expects that no API gives the
// GPU out, that no work holds it, and that the agents have closed the driver.
//
//	persistence mode . . . . . . on: off for the reset, and on again whatever becomes of it
//	open files of /dev/nvidiaN . any: *InUseError, and nothing is reset
//	nvidia-smi --gpu-reset . . . "was successfully reset", or *RefusedError with nvidia-smi's text
//
// A process that has the GPU open is named, and never stopped. nvidia-persistenced has the GPUs open whose persistence mode is on, and closes them when
// it is turned off; so it counts only after that.
//
// Local resets in this process, which is root. Package resetserver has the component that resets for agents which have no rights for it.
package gpureset
