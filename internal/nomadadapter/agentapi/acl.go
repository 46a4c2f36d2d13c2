package agentapi

import (
	"context"
	"errors"
	"net/http"
	"net/url"
	"slices"
	"strings"
)

// The servers leave out of an answer what a token may not see, without a sign (Node.GetAllocs in nomad/node_endpoint.go): an answer has all
// allocations of a node only if the token may read jobs in every namespace.

// notAll is why an answer may lack allocations, with the remedy.
const notAll = `the ACL token does not show the allocations of every namespace: give it namespace "*" { policy = "read" }, and no rule of a namespace without read-job`

// hidden returns why an answer to the token may lack allocations; "" = it lacks none, or the servers have no ACLs.
func (c *Client) hidden(ctx context.Context) (why string) {
	all, err := c.seesAll(ctx)
	switch {
	case err != nil:
		return "it is not known what the ACL token may see: " + err.Error()
	case !all:
		return notAll
	}
	return ""
}

func (c *Client) seesAll(ctx context.Context) (bool, error) {
	var self struct{ Type string }
	_, err := c.get(ctx, "/v1/acl/token/self", &self)
	switch {
	case hasStatus(err, http.StatusBadRequest, aclDisabled):
		return true, nil
	case err != nil && !hasStatus(err, http.StatusNotFound, ""): // 404: of a workload identity
		return false, err
	case self.Type == "management": // structs.ACLManagementToken
		return true, nil
	}
	var names []struct{ Name string }
	switch _, err = c.get(ctx, "/v1/acl/policies", &names); {
	case hasStatus(err, http.StatusBadRequest, aclDisabled): // token/self describes a token without ACLs, too
		return true, nil
	case err != nil:
		return false, err
	}
	var all []policy // those of the token, and of its roles
	for _, n := range names {
		var p policy
		if _, err = c.get(ctx, "/v1/acl/policy/"+url.PathEscape(n.Name), &p); err != nil {
			return false, err
		}
		all = append(all, p)
	}
	return readsEveryNamespace(all), nil
}

// aclDisabled is the text of the error of servers without ACLs (nomad/acl_endpoint.go).
const aclDisabled = "ACL support disabled"

func hasStatus(err error, code int, text string) bool {
	e, ok := errors.AsType[*statusError](err)
	return ok && e.code == code && strings.Contains(e.text, text)
}

// policy is what is needed of an ACL policy (structs.ACLPolicy). The servers add the capabilities of a namespace's policy to those of its rule.
type policy struct {
	RulesJSON struct {
		Namespaces []struct {
			Name         string // may have "*"
			Capabilities []string
		}
	}
}

// readsEveryNamespace reports whether policies together allow read-job in every namespace (NewACL and AllowNamespaceOperation in acl/acl.go): of
// the rules that match a namespace the closest counts, and deny takes precedence.
func readsEveryNamespace(all []policy) bool {
	const deny, readJob = "deny", "read-job"
	capabilities := map[string][]string{}
	for _, p := range all {
		for _, n := range p.RulesJSON.Namespaces {
			capabilities[n.Name] = append(capabilities[n.Name], n.Capabilities...)
		}
	}
	for _, of := range capabilities {
		if slices.Contains(of, deny) || !slices.Contains(of, readJob) {
			return false
		}
	}
	return len(capabilities["*"]) > 0
}
