package limitserver

import (
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// Paths of the requests. Each is a POST request with a request, and is answered with an answer.
const (
	readyURL = "/v1/ready" // an empty request
	setURL   = "/v1/set"
	tryURL   = "/v1/try" // a request with a GPU
)

// request is a limit of a group on a GPU.
type request struct {
	Group string       `json:"group"` // below the mount point: "/kubepods/burstable/podUID"
	Inode uint64       `json:"inode"` // of the group that is meant
	GPU   gpu.DeviceID `json:"gpu"`
	Soft  uint64       `json:"soft"`        // bytes
	Hard  uint64       `json:"hard,string"` // bytes, or gpu.NoMemoryLimit, which a number of JSON can't have in each implementation

	// Within is how long after its arrival the limit may be set, in milliseconds; 0 = any time. The client leaves later: the driver takes time, too.
	Within int64 `json:"within,omitempty"`
}

// until is when it is too late for a request that has arrived.
func (r request) until() time.Time {
	if r.Within == 0 {
		return time.Now().Add(queueWithin + driverWithin)
	}
	return time.Now().Add(time.Duration(r.Within) * time.Millisecond)
}

type answer struct {
	Error *wireError `json:"error,omitempty"`
}

// kind is which error a wireError is; "" or another one is a text.
type kind string

const (
	gone        kind = "GONE"        // fs.ErrNotExist
	unavailable kind = "UNAVAILABLE" // *UnavailableError
)

type wireError struct {
	Kind   kind   `json:"kind,omitempty"`
	Remedy string `json:"remedy,omitempty"` // UNAVAILABLE
	Text   string `json:"text"`
}

// UnavailableError is that no limit can be set at present, by this node as it is set up.
type UnavailableError struct {
	Remedy string
	Err    error
}

// Error begins with the remedy, because the cause of a pool has room for little more.
func (e *UnavailableError) Error() string { return fmt.Sprintf("%s (%v)", e.Remedy, e.Err) }

func (e *UnavailableError) Unwrap() error { return e.Err }

// goneError is that a group has ended, or that another one has its path.
type goneError struct{ text string }

func (e *goneError) Error() string { return e.text }

func (e *goneError) Unwrap() error { return fs.ErrNotExist }

func encode(err error) *wireError {
	if err == nil {
		return nil
	}
	if e, ok := errors.AsType[*UnavailableError](err); ok {
		return &wireError{unavailable, e.Remedy, e.Err.Error()}
	}
	if errors.Is(err, fs.ErrNotExist) {
		return &wireError{Kind: gone, Text: err.Error()}
	}
	return &wireError{Text: err.Error()}
}

func (e *wireError) decode() error {
	switch {
	case e == nil:
		return nil
	case e.Kind == unavailable:
		return &UnavailableError{e.Remedy, errors.New(e.Text)}
	case e.Kind == gone:
		return &goneError{e.Text}
	}
	return errors.New(e.Text)
}
