// Package simdriver lays out and scripts simulated machines with NVIDIA GPUs.
//
// A machine is a directory. Its machine.conf says which GPUs there are; a small
// libnvidia-ml.so.1, compiled from lib/, answers NVML calls from that file; and
// the sysfs, procfs and /dev trees of the same machine lie beside it. The file
// is the truth: every process that has loaded the library reads it again when
// it changes, so a test or the simctl command can lose a GPU or raise an XID
// under agents that run.
//
// README.md describes the format, the faults and what is not claimed.
package simdriver
