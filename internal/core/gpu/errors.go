package gpu

import "errors"

var (
	// ErrNoDriver means that the node has no usable driver at present: no library, or no kernel module. It is a
	// state of the node, not a failure: try again.
	ErrNoDriver = errors.New("no NVIDIA driver")

	// ErrUnloaded means that there is no driver because the kernel module was unloaded, so that a driver that
	// responds later was loaded again. It is wrapped together with ErrNoDriver; ErrNoDriver alone may mean that
	// only the library is missing.
	ErrUnloaded = errors.New("the kernel module was unloaded")

	// ErrDriverLost means that the driver responded before and no longer does: close the session and open another.
	ErrDriverLost = errors.New("NVIDIA driver lost")

	// ErrDriverStale means that this process has loaded the library of another driver version than that of the
	// kernel module. A process can't load a second version: exit, and let the supervisor start a new process.
	ErrDriverStale = errors.New("NVIDIA driver was replaced under this process")
)
