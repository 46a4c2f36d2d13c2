package core

import "errors"

var (
	// ErrNoDriver says that this node has no usable driver at present: no library, or no kernel module.
	// It is a state of the node, not a failure: keep trying.
	ErrNoDriver = errors.New("no NVIDIA driver")

	// ErrUnloaded says that there is no driver NewHealth the kernel module was unloaded: one that answers later was loaded
	// anew. It comes with ErrNoDriver, which alone may mean that only the library is missing.
	ErrUnloaded = errors.New("the kernel module was unloaded")

	// ErrDriverLost says that the driver could be asked before and no longer can: close the session and
	// open another.
	ErrDriverLost = errors.New("NVIDIA driver lost")

	// ErrDriverStale says that this process holds the library of another driver version than the kernel
	// module's. Only a new process can load the new one: exit, and let the supervisor start again.
	ErrDriverStale = errors.New("NVIDIA driver was replaced under this process")
)
