package worktest

import (
	"encoding/json"
	"net/http"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
)

// Refuse answers a request with an error.
func Refuse(w http.ResponseWriter, code agentlab.Code, status int) {
	w.Header().Set("Content-Type", "application/problem+json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(api.Error{Code: string(code), Detail: "refused"})
}
