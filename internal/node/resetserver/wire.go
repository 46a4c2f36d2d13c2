package resetserver

import (
	"cmp"
	"errors"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/node/gpureset"
)

// Paths of the requests. Each is a POST request with a gpureset.Target, and is answered with an answer.
const (
	readyURL   = "/v1/ready"
	lookURL    = "/v1/look"
	resetURL   = "/v1/reset"
	restoreURL = "/v1/restore"
)

// persistenceHeader is sent before a reset begins, if the persistence mode of the GPU is on: the client knows it then also if the server is killed.
const persistenceHeader = "Tandem-Persistence-Mode"

// answer is the body of a response.
type answer struct {
	Look   gpureset.Look `json:"look,omitzero"`
	Errors []wireError   `json:"errors,omitempty"`
}

// kind is which error of gpureset a wireError is; "" or another one is a text.
type kind string

const (
	inUse       kind = "IN_USE"
	refused     kind = "REFUSED"
	persistence kind = "PERSISTENCE"
	unavailable kind = "UNAVAILABLE"
	busy        kind = "BUSY"
)

// wireError is an error of gpureset.
type wireError struct {
	Kind    kind              `json:"kind,omitempty"`
	GPU     gpu.DeviceID      `json:"gpu,omitempty"`
	Clients []gpureset.Client `json:"clients,omitempty"` // IN_USE
	Refusal gpureset.Refusal  `json:"refusal,omitempty"` // REFUSED
	Remedy  string            `json:"remedy,omitempty"`  // UNAVAILABLE
	Text    string            `json:"text"`
	Cause   *wireError        `json:"cause,omitempty"` // PERSISTENCE
}

// encode returns an error, or each of several, for the wire.
func encode(err error) (all []wireError) {
	if err == nil {
		return nil
	}
	if list, ok := err.(interface{ Unwrap() []error }); ok {
		for _, one := range list.Unwrap() {
			all = append(all, encode(one)...)
		}
		return all
	}
	return []wireError{encodeOne(err)}
}

func encodeOne(err error) wireError {
	// A persistence error has the error of a call in it.
	if e, ok := errors.AsType[*gpureset.PersistenceError](err); ok {
		cause := encodeOne(e.Err)
		return wireError{Kind: persistence, GPU: e.GPU, Text: err.Error(), Cause: &cause}
	}
	if e, ok := errors.AsType[*gpureset.UnavailableError](err); ok {
		return wireError{Kind: unavailable, Remedy: e.Remedy, Text: e.Err.Error()}
	}
	if _, ok := errors.AsType[*gpureset.BusyError](err); ok {
		return wireError{Kind: busy, Text: err.Error()}
	}
	if e, ok := errors.AsType[*gpureset.InUseError](err); ok {
		return wireError{Kind: inUse, GPU: e.GPU, Clients: e.Clients, Text: err.Error()}
	}
	if e, ok := errors.AsType[*gpureset.RefusedError](err); ok {
		return wireError{Kind: refused, GPU: e.GPU, Refusal: e.Refusal, Text: e.Text}
	}
	return wireError{Text: err.Error()}
}

// decode returns the errors of an answer; nil = there is none.
func decode(all []wireError) error {
	errs := make([]error, len(all))
	for i := range all {
		errs[i] = all[i].decode()
	}
	if len(errs) == 1 {
		return errs[0]
	}
	return errors.Join(errs...)
}

func (e *wireError) decode() error {
	switch e.Kind {
	case inUse:
		return &gpureset.InUseError{GPU: e.GPU, Clients: e.Clients}
	case refused:
		return &gpureset.RefusedError{GPU: e.GPU, Refusal: e.Refusal, Text: e.Text}
	case unavailable:
		return &gpureset.UnavailableError{Remedy: e.Remedy, Err: errors.New(e.Text)}
	case busy:
		return &gpureset.BusyError{}
	case persistence:
		return &gpureset.PersistenceError{GPU: e.GPU, Err: cmp.Or(e.Cause, &wireError{Text: e.Text}).decode()}
	}
	return errors.New(e.Text)
}
