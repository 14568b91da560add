package server

import "strings"

// OpenAPI returns the OpenAPI 3.1 document of the API as YAML.
func (s *Server) OpenAPI() ([]byte, error) { return s.api.OpenAPI().YAML() }

// documented returns a path of the mux in the syntax of OpenAPI, which has
// none for a parameter with slashes.
func documented(path string) string { return strings.Replace(path, "...}", "}", 1) }

// documentPaths converts the paths of the document to the syntax of OpenAPI.
func (s *Server) documentPaths() {
	paths := s.api.OpenAPI().Paths
	for path, item := range paths {
		if want := documented(path); want != path {
			delete(paths, path)
			paths[want] = item
		}
	}
}
