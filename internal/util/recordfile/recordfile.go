// Package recordfile keeps what a part of an agent remembers in a file of the state directory, and has a problem for as long as it can't.
package recordfile

import (
	"errors"
	"io/fs"
	"log/slog"

	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/internal/util/problemset"
	"github.com/tandem-gpu/tandem/internal/util/statefile"
)

// Options describe what a file has, and what follows if it can't be used.
type Options[R any] struct {
	Path     string // "" = the record is forgotten with the process
	MaxBytes int
	Parse    func([]byte) (R, error)
	Encode   func(R) ([]byte, error) // a JSON object; see statefile.Seal

	Problems *problemset.Set
	Code     problem.Code // of the problem
	Name     string       // "the record of proofs"
	Without  string       // what follows from the problem: "no GPU is proved"
	Damaged  string       // what follows if an operator removes a damaged file: "no GPU counts as proved"
}

// File is the record on disk. Make one with New. It is for one goroutine at a time.
type File[R any] struct {
	opts   Options[R]
	text   string // as it is or would be on disk
	onDisk bool   // it is there, unless someone has removed the file
	loaded bool
}

// New returns a File. It reads nothing.
func New[R any](o Options[R]) *File[R] { return &File[R]{opts: o, loaded: o.Path == ""} }

// Loaded reports whether the record on disk is known. One that is not must not be replaced.
func (f *File[R]) Loaded() bool { return f.loaded }

// Load sets the record from the file, once: when it has succeeded, it does nothing. Without a file the record stays as it is, and none is written before
// it changes.
func (f *File[R]) Load(record *R) error {
	if f.loaded {
		return nil
	}
	r, text, err := f.read()
	if err == nil {
		*record, f.text, f.onDisk = r, string(text), true
	}
	if errors.Is(err, fs.ErrNotExist) {
		text, err = f.opts.Encode(*record)
		f.text, f.onDisk = string(statefile.Seal(text)), false
	}
	f.loaded = err == nil
	f.note(err, "can't be read")
	return err
}

// Read returns the record as another one may have written it to the file. It fails also without a file, and changes nothing.
func (f *File[R]) Read() (R, error) {
	r, _, err := f.read()
	return r, err
}

func (f *File[R]) read() (r R, text []byte, err error) {
	text, err = statefile.Read(f.opts.Path, f.opts.MaxBytes+statefile.SealBytes, 0)
	if err != nil {
		return r, nil, err
	}
	content, err := statefile.Unseal(text)
	if err == nil {
		r, err = f.opts.Parse(content)
	}
	return r, text, err
}

// Store writes a record if its text differs from the one on disk, or if the file was removed.
func (f *File[R]) Store(record R) error {
	if f.opts.Path == "" {
		return nil
	}
	text, err := f.opts.Encode(record)
	text = statefile.Seal(text)
	if err == nil && (string(text) != f.text || f.onDisk && statefile.IsMissing(f.opts.Path)) {
		if err = statefile.Write(f.opts.Path, text); err == nil {
			f.text, f.onDisk = string(text), true
		}
	}
	f.note(err, "can't be written")
	return err
}

// OnDisk reports whether there is a file, unless someone has removed it: Store is to be called at least each
// statefile.LookEvery then.
func (f *File[R]) OnDisk() bool { return f.onDisk }

// note keeps the problem of the file.
func (f *File[R]) note(err error, what string) {
	o := &f.opts
	if err == nil {
		o.Problems.End(o.Code, o.Path, o.Name+" is read and written again")
		return
	}
	one := problem.Problem{
		Code: o.Code, Object: o.Path, Text: o.Without + ": " + o.Name + " " + o.Path + " " + what + ": " + err.Error(),
		Remedy: "mend the file system; a file that is damaged may be removed, then " + o.Damaged,
	}
	o.Problems.Put(one, slog.LevelWarn, one.Text)
}
