package publisher

import (
	"context"
	"errors"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
)

// NamePrefix begins the names of the ResourceSlices that an agent makes for a node and a driver.
func NamePrefix(node, driver string) string { return newNames(node, driver).prefix }

// Remove deletes the slices that an agent has made for a node and a driver, and returns how many it deleted. Those of another driver of the
// same name stay.
func Remove(ctx context.Context, api *kubeapi.Client, node, driver string) (deleted int, err error) {
	names := newNames(node, driver)
	list, err := api.Slices(ctx, kubeapi.SliceSelector{Node: node, Driver: driver})
	if err != nil {
		return 0, err
	}
	var errs []error
	for _, s := range list.Items {
		if !names.own(s.Metadata.Name) {
			continue
		}
		err := api.DeleteSlice(ctx, s.Metadata.Name, s.Metadata.UID)
		switch {
		case err == nil:
			deleted++
		case !errors.Is(err, kubeapi.ErrNotFound):
			errs = append(errs, err)
		}
	}
	return deleted, errors.Join(errs...)
}
