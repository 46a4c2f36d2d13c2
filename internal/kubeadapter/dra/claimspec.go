package dra

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/tandem-gpu/tandem/internal/cdi/specfile"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/prepared"
	"github.com/tandem-gpu/tandem/internal/util/dirwatch"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/internal/util/watchdog"
)

// claimSpecs are the CDI specifications of claims: of those whose containers are clients of an MPS control daemon. What other containers
// need is in the specification of the agent. The names differ from those of NVIDIA's driver (k8s.gpu.nvidia.com-claim_UID.yaml), whose
// files stay as they are.
type claimSpecs struct {
	folder  string // that container runtimes read
	vendor  string
	mpsRoot string // of the pipe directories, on the host

	mu    sync.Mutex
	files map[string]*specfile.File // by UID
}

const (
	classClaim  = "claim"
	specVersion = "0.6.0" // the oldest that has everything here; containerd 2 and CRI-O 1.28 read it
	mpsFolder   = "/mps"  // of the pipe directories, in containers: as NVIDIA's k8s-device-plugin has it
)

func (s *claimSpecs) kind() string { return s.vendor + "/" + classClaim }

// name is the qualified name of the device of a claim's result.
func (s *claimSpecs) name(uid string, result int) string {
	return fmt.Sprintf("%s=%s-%d", s.kind(), uid, result)
}

// prefix begins the names of all files.
func (s *claimSpecs) prefix() string { return s.vendor + "-" + classClaim + "_" }

func (s *claimSpecs) path(uid string) string {
	return filepath.Join(s.folder, s.prefix()+uid+".json")
}

// text returns the specification of a claim; nil if it needs none.
func (s *claimSpecs) text(c prepared.Claim) ([]byte, error) {
	spec := specs.Spec{Version: specVersion, Kind: s.kind()}
	for i, r := range c.Results {
		if r.MPS == nil {
			continue
		}
		_, name, _ := strings.Cut(s.name(c.UID, i), "=")
		spec.Devices = append(spec.Devices, specs.Device{Name: name, ContainerEdits: s.mpsClient(*r.MPS)})
	}
	if len(spec.Devices) == 0 {
		return nil, nil
	}
	return specfile.Marshal(&spec)
}

// mpsClient makes a container a client of a pool's MPS control daemon, as Allocate of the device plugin does. All daemons use one
// /dev/shm.
func (s *claimSpecs) mpsClient(m prepared.MPS) specs.ContainerEdits {
	pipe := path.Join(mpsFolder, inventory.ResourceDomain, m.Pool, "pipe")
	options := []string{"rbind", "rprivate", "rw", "nosuid", "nodev"}
	return specs.ContainerEdits{
		Env: append([]string{"CUDA_MPS_PIPE_DIRECTORY=" + pipe}, m.Env...),
		Mounts: []*specs.Mount{
			{HostPath: path.Join(s.mpsRoot, inventory.ResourceDomain, m.Pool, "pipe"), ContainerPath: pipe, Options: options},
			{HostPath: path.Join(s.mpsRoot, "shm"), ContainerPath: "/dev/shm", Options: options},
		},
	}
}

// ensure makes the specification of a claim be on disk, if it needs one. It does not write a file that is as it should be.
func (s *claimSpecs) ensure(c prepared.Claim) error {
	text, err := s.text(c)
	if err != nil || text == nil {
		return err
	}
	if err := specfile.MakeFolder(s.folder); err != nil {
		return err
	}
	f := s.file(c.UID)
	if state, _ := f.Check(); state == specfile.Ours && f.Holds(text, 0) {
		return nil
	}
	if err := f.Replace(text, 0); err != nil {
		return fmt.Errorf("CDI specification of the claim %w", err)
	}
	return nil
}

// file is that of a claim. The caller has the lock of the claim.
func (s *claimSpecs) file(uid string) *specfile.File {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.files == nil {
		s.files = map[string]*specfile.File{}
	}
	if s.files[uid] == nil {
		s.files[uid] = &specfile.File{Path: s.path(uid)}
	}
	return s.files[uid]
}

// remove removes the specification of a claim, if there is one, and what killed processes left of it.
func (s *claimSpecs) remove(uid string) error {
	(&specfile.File{Path: s.path(uid)}).Sweep()
	if err := os.Remove(s.path(uid)); err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, fs.ErrInvalid) {
		return fmt.Errorf("CDI specification of the claim not removed: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.files, uid)
	return nil
}

// uids returns the claims of the files in the folder, also of those that killed processes left unfinished.
func (s *claimSpecs) uids() (all []string) {
	entries, _ := os.ReadDir(s.folder) // nil if it is missing
	for _, e := range entries {
		rest, ok := strings.CutPrefix(strings.TrimPrefix(e.Name(), "."), s.prefix())
		uid, _, isSpec := strings.Cut(rest, ".json")
		if ok && isSpec && prepared.CheckUID(uid) == nil {
			all = append(all, uid)
		}
	}
	return all
}

// isClaimSpec reports whether a file name is that of a specification of a claim.
func (s *claimSpecs) isClaimSpec(name string) bool { return strings.HasPrefix(name, s.prefix()) }

// restore makes the files fit the claims. A claim that a call works on is left to it.
func (a *Adapter) restoreSpecs(ctx context.Context, store *prepared.Store) {
	var problems []string
	a.forgetUnprepared(store)
	for _, c := range store.All() {
		if ctx.Err() != nil {
			return
		}
		a.withClaim(c.UID, func() {
			now, ok := store.Get(c.UID)
			if !ok || now.State != prepared.Complete {
				return
			}
			if err := a.specs.ensure(now); err != nil {
				problems = append(problems, fmt.Sprintf("%s: %s", c, oneLine(err)))
			}
		})
	}
	for _, uid := range a.specs.uids() {
		a.withClaim(uid, func() {
			if _, ok := store.Get(uid); !ok && !a.storedNow(store, uid) {
				if err := a.specs.remove(uid); err != nil {
					problems = append(problems, oneLine(err))
				}
			}
		})
	}
	a.setProblems(problem.ClaimCDI, problems...)
}

// storedNow reports whether another process has stored a claim meanwhile, or its record can't be read.
func (a *Adapter) storedNow(store *prepared.Store, uid string) bool {
	if a.readOthers(store) != nil || slices.ContainsFunc(store.Unread(), func(u prepared.Unread) bool { return u.UID == uid }) {
		return true // not known
	}
	_, ok := store.Get(uid)
	return ok
}

// withClaim calls do with the lock of a claim, unless another call has it.
func (a *Adapter) withClaim(uid string, do func()) {
	if release := a.locks.tryLock(uid); release != nil {
		defer release()
		do()
	}
}

// watchSpecs restores specifications of claims that others have removed, also with their folder, until ctx ends. Before the first claim
// has one, it watches nothing: instances of inotify are few on a node.
func (a *Adapter) watchSpecs(ctx context.Context, task *watchdog.Task) {
	if a.specs.folder == "" {
		return
	}
	store := a.store.Load()
	a.restoreSpecs(ctx, store)
	for all := range store.Watch().Watch(ctx) {
		task.Heartbeat(0)
		if slices.ContainsFunc(all, prepared.Claim.HasSpec) {
			break
		}
	}
	dirwatch.Directory{
		Path: a.specs.folder, Interval: a.limits.specsEvery, PollInterval: a.limits.socketPoll, Relevant: a.specs.isClaimSpec,
		Log: a.opts.Log.With("directory", a.specs.folder), Task: task,
	}.Watch(ctx, func() { a.restoreSpecs(ctx, store) })
}
