// Package cdi has the specifications of this project read by the CDI libraries of container runtimes: 0.8.1 (containerd 1.7), 1.0.1
// (containerd 2.0 to 2.2, Docker 28, podman 5, CRI-O 1.33) and 1.1.1 (containerd 2.4). Each is linked into a process of its own.
package cdi
