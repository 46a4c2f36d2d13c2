package control

import (
	"context"
	"errors"
	"io"
	"net/http"

	"github.com/tandem-gpu/tandem/internal/operator/explain"
	"github.com/tandem-gpu/tandem/internal/operator/report"
)

// explain answers a question. It changes nothing, so it is not logged.
func (h handler) explain(w http.ResponseWriter, r *http.Request) {
	var args explain.Args
	var e explain.Explanation
	err := decode(w, r, &args)
	if err == nil {
		e, err = explain.Explain(explain.Input{State: h.State(), Use: h.Use(), Adapter: h.Explain}, args)
	}
	if err != nil {
		respond(w, statusCode(err), errorBody{err.Error()})
		return
	}
	e.Source = report.FromAgent
	respond(w, http.StatusOK, e)
}

// Explain writes what the running agent at path answers to a question. If no agent answers it writes what read returns, with the reason.
func Explain(ctx context.Context, path string, args explain.Args, read func(context.Context) (explain.Explanation, error), out io.Writer, asJSON bool) error {
	e, err := call[explain.Explanation](ctx, path, explainURL, args)
	if refused, ok := errors.AsType[*RefusedError](err); ok && refused.Status == http.StatusBadRequest {
		return err
	}
	if err != nil {
		reason := fromDriver(path, err)
		if e, err = read(ctx); err != nil {
			return err
		}
		e.Source, e.Warnings = report.FromDriver, append(e.Warnings, reason)
	}
	write := e.Write
	if asJSON {
		write = func(out io.Writer) error { return report.WriteJSON(out, e) }
	}
	if err := write(out); err != nil {
		return err
	}
	return e.Refused()
}
