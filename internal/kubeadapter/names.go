package kubeadapter

import "github.com/tandem-gpu/tandem/internal/core/inventory"

// GPUResource is the resource of full GPUs, and of every unit under the MIG strategy "single".
const GPUResource = inventory.ResourceDomain + inventory.DefaultPool

// ResourceOf returns the extended resource of a unit: its pool in NVIDIA's domain, as in NVIDIA's k8s-device-plugin.
func ResourceOf(u inventory.Unit) string { return inventory.ResourceDomain + u.Pool }
