// Package imported compares what k8s-gpu answers with an imported configuration with what NVIDIA's k8s-device-plugin answers with the
// original: for each example of its documents, on simulated machines.
package imported
