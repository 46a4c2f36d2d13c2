package limitserver

import (
	"errors"
	"fmt"
	"io/fs"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/node/cgroup"
	"github.com/tandem-gpu/tandem/internal/node/component"
)

// check returns an error for a request that no state of the node makes right.
func (r request) check() error {
	var errs []error
	if !cgroup.OfPod(r.Group) {
		errs = append(errs, fmt.Errorf("%q is not the control group of a pod or of a container of one", r.Group))
	}
	if err := component.CheckGPU(r.GPU); err != nil {
		errs = append(errs, err)
	}
	switch {
	case r.Hard == gpu.NoMemoryLimit:
		if r.Soft != 0 {
			errs = append(errs, fmt.Errorf("soft limit %d without a hard one: want 0", r.Soft))
		}
	case r.Hard == 0 || r.Hard%gpu.MiB != 0:
		errs = append(errs, fmt.Errorf("hard limit of %d bytes: want whole MiB, or no limit", r.Hard))
	case r.Soft != 0 && r.Soft != r.Hard:
		errs = append(errs, fmt.Errorf("soft limit of %d bytes: want 0 or the hard one", r.Soft))
	}
	return errors.Join(errs...)
}

func (r request) checkTry() error { return component.CheckGPU(r.GPU) }

// checkGroup returns an error that wraps fs.ErrNotExist if the group of a request has ended or is another one.
func (s *Server) checkGroup(r request) error {
	if err := s.checkMount(); err != nil {
		return err
	}
	switch g, err := s.Groups.Read(r.Group); {
	case errors.Is(err, fs.ErrNotExist):
		return &goneError{fmt.Sprintf("the control group %s has ended", r.Group)}
	case err != nil:
		return err
	case g.ID != (cgroup.ID{Path: r.Group, Inode: r.Inode}):
		return &goneError{fmt.Sprintf("the control group %s has the inode %d, not %d: it is another one", r.Group, g.Inode, r.Inode)}
	}
	return nil
}

func (s *Server) checkMount() error {
	if err := s.Groups.Check(); err != nil {
		return &UnavailableError{"mount the host's control groups of version 2 at " + s.Groups.Mount, err}
	}
	return nil
}

// checkGPU returns an error if the GPU of a request can't have the limit.
func checkGPU(r request, d gpu.Device) error {
	switch {
	case d.MIG:
		return fmt.Errorf("%s: the driver counts no memory on a GPU while its MIG mode is enabled", r.GPU)
	case r.Hard != gpu.NoMemoryLimit && r.Hard > d.Memory:
		return fmt.Errorf("%s: hard limit of %d MiB: the GPU has %d", r.GPU, r.Hard/gpu.MiB, d.Memory/gpu.MiB)
	}
	return nil
}
